"""Steps of the trainers of frameworks that train on preferences: pairs of answers, good and bad answers, rewards."""
