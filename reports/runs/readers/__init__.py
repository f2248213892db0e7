"""Readers: a file of one format becomes rows. Which reader a file needs is seen in its content (recognise.py)."""
