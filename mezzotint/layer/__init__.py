"""What modules and operations share: parameters, delayed scaling's state, the recipe in force made into arguments."""
