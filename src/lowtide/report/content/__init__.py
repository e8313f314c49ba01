"""What a report has to tell, before anybody has decided how to show it."""
