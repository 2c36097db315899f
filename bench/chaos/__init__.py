"""Faults on purpose, and what must hold through them: clients record histories, a checker judges them.

::

    schedule -> nemesis -> processes, broker, proxy          driver -> gateways
                                                               |
    evidence of the broker, the pools, the scrapes          history        history of a run without faults
                    \\______________________________________   |   ________________/
                                                            checker -> findings, by invariant
"""
