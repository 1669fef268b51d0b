"""The place where flex-block-attn's masks were; an import says where they are."""

raise ImportError("create_sta_3d_mask, create_moba_3d_mask and create_ssta_3d_mask are in ssta.interfaces")
