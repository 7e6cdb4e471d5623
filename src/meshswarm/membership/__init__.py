"""Private swarms: their keys on disk, invites, the owner's list of who was expelled, and how both reach every member.

`swarms.Swarms` holds what a folder knows, `keeper.Keeper` keeps a running peer's membership up to date. What decides
(`invite`, `member_list`, `standing`, `news`) is plain code that is handed the time.
"""
