"""Images that do not fit in memory: from files to batches on the device, in an order that can be taken up again."""
