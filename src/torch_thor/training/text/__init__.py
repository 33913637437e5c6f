"""Text corpora for masked language models: from dumps and text files to shards of token ids, and to batches."""
