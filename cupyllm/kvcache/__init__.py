"""The paged KV cache: blocks.py decides which page holds which tokens, pool.py holds the pages' memory."""
