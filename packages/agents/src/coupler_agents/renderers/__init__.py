"""Turn messages into ids with the renderers library, where a chat template is not
proved.
"""
