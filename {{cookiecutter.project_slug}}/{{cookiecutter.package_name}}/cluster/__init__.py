"""What holds the processes of one run together: starting them, stopping them, agreeing."""
