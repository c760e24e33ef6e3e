"""The subcommands of `expertd`, one module each; `expertd.service.cli` registers them."""
