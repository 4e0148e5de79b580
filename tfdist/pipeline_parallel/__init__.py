"""A model in stages on several devices: where it is cut, where its parts are, and in which order stages compute."""
