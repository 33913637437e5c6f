"""What a run leaves on the disk to go on from, and the folder it stands in."""
