"""Parts of a worker that need torch, which is imported when they are used."""
