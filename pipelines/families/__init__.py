"""The models that SSTA knows, one file a family; each is imported when a model of its first comes."""

# Class name in diffusers -> where its family is.
PLACES = {
    "AllegroTransformer3DModel": "ssta.pipelines.families.allegro:ALLEGRO",
    "AnyFlowFARTransformer3DModel": "ssta.pipelines.families.anyflow_far:ANYFLOW_FAR",
    "AnyFlowTransformer3DModel": "ssta.pipelines.families.anyflow:ANYFLOW",
    "ChronoEditTransformer3DModel": "ssta.pipelines.families.wan:CHRONOEDIT",
    "CogVideoXTransformer3DModel": "ssta.pipelines.families.cogvideox:COGVIDEOX",
    "ConsisIDTransformer3DModel": "ssta.pipelines.families.cogvideox:CONSISID",
    "CosmosTransformer3DModel": "ssta.pipelines.families.cosmos:COSMOS",
    "EasyAnimateTransformer3DModel": "ssta.pipelines.families.easyanimate:EASYANIMATE",
    "HeliosTransformer3DModel": "ssta.pipelines.families.helios:HELIOS",
    "HunyuanVideo15Transformer3DModel": "ssta.pipelines.families.hunyuan_video_15:HUNYUAN_VIDEO_15",
    "HunyuanVideoFramepackTransformer3DModel": "ssta.pipelines.families.hunyuan_video_framepack:HUNYUAN_VIDEO_FRAMEPACK",
    "HunyuanVideoTransformer3DModel": "ssta.pipelines.families.hunyuan_video:HUNYUAN_VIDEO",
    "Kandinsky5Transformer3DModel": "ssta.pipelines.families.kandinsky5:KANDINSKY5",
    "Kandinsky6Transformer3DModel": "ssta.pipelines.families.kandinsky6:KANDINSKY6",
    "LTX2VideoTransformer3DModel": "ssta.pipelines.families.ltx2:LTX2",
    "LTXVideoTransformer3DModel": "ssta.pipelines.families.ltx:LTX_VIDEO",
    "MiniMaxH3Transformer3DModel": "ssta.pipelines.families.minimax_h3:MINIMAX_H3",
    "MochiTransformer3DModel": "ssta.pipelines.families.mochi:MOCHI",
    "MotifVideoTransformer3DModel": "ssta.pipelines.families.motif_video:MOTIF_VIDEO",
    "SanaWMLTX2RefinerTransformer3DModel": "ssta.pipelines.families.sana_wm_refiner:SANA_WM_REFINER",
    "SkyReelsV2Transformer3DModel": "ssta.pipelines.families.skyreels_v2:SKYREELS_V2",
    "WanAnimateTransformer3DModel": "ssta.pipelines.families.wan:WAN_ANIMATE",
    "WanTransformer3DModel": "ssta.pipelines.families.wan:WAN",
    "WanVACETransformer3DModel": "ssta.pipelines.families.wan:WAN_VACE",
}
