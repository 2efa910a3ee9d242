"""What holds the processes of one run together: starting them, comparing them, watching them, stopping them."""
