"""The pure cores of layers: this package defines forward, setup and backward as functions of argument objects. They
know no modules, no recipes and no state."""
