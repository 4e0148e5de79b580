"""What a strategy is to the loop and to the instruments, below all that uses it."""
