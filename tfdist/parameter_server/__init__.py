"""Variables on servers, and the workers that compute with them."""
