"""HTTP request and response types, and validation errors."""
