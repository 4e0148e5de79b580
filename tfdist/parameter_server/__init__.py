"""Training with variables on parameter servers, and the workers that compute the steps."""
