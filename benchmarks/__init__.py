"""Programs that compare tfdist with its peers in one run; see README.md in this folder."""
