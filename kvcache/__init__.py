"""A paged KV cache: pages, block tables, a prefix index, and the manager that a serving loop drives."""
