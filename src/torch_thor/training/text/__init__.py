"""Text corpora for masked language models: preparing token ids, and examples from them."""
