"""The gateway: an agent that knows nothing of training asks the policy over HTTP, in OpenAI's form.

    agent ── HTTP, one key an episode ──▶ GatewayApp ──▶ GatewaySession ──▶ Player ──▶ the engine
                                          (routes,       (messages become
                                           errors)        tokens and turns)

Everything here belongs to the episode thread.
"""
