"""Generation: sampling, and the loop that serves several sequences at once."""
