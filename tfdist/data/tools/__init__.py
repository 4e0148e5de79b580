"""Tools for datasets: pipeline speed, contact sheet and download."""
