"""Where finished videos lie: a local folder or an object store, as the API and a supervisor see them."""
