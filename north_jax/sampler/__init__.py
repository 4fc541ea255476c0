"""Drawing completions: the embedded engine, its HTTP server in SGLang's interface, and the client for either."""
