"""The token cache: built once by one process, measured, and mapped into memory by every rank."""
