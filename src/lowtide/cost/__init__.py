"""What ops take: bytes and seconds, measured, looked up or estimated."""
