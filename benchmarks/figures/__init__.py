"""Tables and sentences for the documents, one function for each benchmark's JSON."""
