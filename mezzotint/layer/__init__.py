"""The package that modules and operations share: it holds their parameters and delayed scaling's state, and makes the
recipe in force into arguments of a run."""
