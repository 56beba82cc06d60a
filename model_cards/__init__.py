"""What gets published: the model card, its template, and the push to the Hub."""
