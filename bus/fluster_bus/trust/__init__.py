"""Who may use a bus, by signature: keys, the tokens that they sign, and the authority that issues and revokes them.

The server trusts one operator key. What a user may do stands in a token that a key of the cluster has signed, so users and
namespaces come and go without a change of any server's configuration. The formats are those of NATS:
https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt
"""
