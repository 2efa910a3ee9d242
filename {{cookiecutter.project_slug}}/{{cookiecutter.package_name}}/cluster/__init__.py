"""What holds the processes of one training together on a cluster's machines."""
