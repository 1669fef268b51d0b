"""The place where other libraries' names were; an import says where they are."""

raise ImportError("the interfaces of other libraries are in ssta.interfaces, attention by single tokens in ssta.interfaces.tokens, "
                  "MagiAttention's block_sparse_attn in ssta.interfaces.magi")
