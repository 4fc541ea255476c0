"""Kernels, one folder per operation: a plain reference, one file per backend, one public function that picks one."""
