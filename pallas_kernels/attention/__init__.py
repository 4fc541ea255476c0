"""Grouped-query attention over windows and packed documents, forward and backward."""
