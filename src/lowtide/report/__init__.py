"""What lowtide found, shown to people: tables and pictures. Nothing here computes a prediction."""
