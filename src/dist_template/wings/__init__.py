"""Features that training does not need: verbs and their code. The core imports none of them."""
