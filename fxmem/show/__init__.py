"""What people and other tools read: text, pages, graphs, plots, exports. No torch."""
