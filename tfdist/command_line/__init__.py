"""How commands describe their options, and how they answer a mistake on the command line."""
