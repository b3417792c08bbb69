"""Load generation and reports over HTTP."""
