"""Programs that compare tfdist with its peers on one machine; see README.md in this folder."""
