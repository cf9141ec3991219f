"""What `sacctmgr --help` prints."""

TEXT = """\
Usage: sacctmgr [OPTIONS] ACTION ENTITY [NAME...] [KEY=VALUE...]

Edits accounts and users in the accounting database, with the grammar of Slurm's sacctmgr. spur-events
brings every change to the Kubernetes clusters.

  sacctmgr add account NAME [description=TEXT] [organization=TEXT] [parent=NAME]
                            [grptres=TRES] [fairshare=NUMBER] [maxjobs=NUMBER]
  sacctmgr modify account NAME set KEY=VALUE...        only what is named changes
  sacctmgr delete account NAME                         with its members
  sacctmgr show account [NAME...] [withassoc] [format=FIELDS]

  sacctmgr add user NAME account=NAME [defaultaccount=NAME] [adminlevel=LEVEL]
  sacctmgr modify user NAME [account=NAME] set defaultaccount=NAME adminlevel=LEVEL
  sacctmgr delete user NAME [account=NAME]             without account=: from all
  sacctmgr show user [NAME...] [account=NAME] [withassoc] [format=FIELDS]

Actions:   add (create), modify (update), delete (remove), show (list), help, version
Entities:  account, user

Names stand alone or as name=NAME, several as name=one,two; 'where' may stand before them. They are stored
in lower case. A value with spaces is quoted: description="High energy physics".

  TRES     name=number, several with commas: grptres=cpu=64,mem=131072,gres/gpu=8
           mem counts MB (base 10). Each one is changed by itself; -1 clears it: grptres=gres/gpu=-1
  LEVEL    none, operator or administrator
  FIELDS   names with commas, each with %WIDTH, negative to align left: format=account,descr%-30,grptres%40
           account: account description organization parent user fairshare maxjobs grptres
           user: user defaultaccount adminlevel account accounts
  maxjobs=-1 clears the limit, fairshare=-1 sets the default, parent=root means no parent.

Options:
  -i, --immediate     commit without asking (needed where there is no terminal to ask)
  -n, --noheader      no header
  -p, --parsable      fields divided by |, with one at the end
  -P, --parsable2     fields divided by |, without one at the end
      --json          JSON
  -s, --associations  the same as withassoc
  -Q, --quiet         nothing but errors
  -r, --readonly      refuse every change
  -h, --help          this text
  -V, --version       the version

Exit codes: 0 done, 1 failed, 2 wrong usage; whenever it is not 0, nothing was stored.
The database is SPUR_EVENTS_DATABASE_URL, or 'url' in table [database] of /etc/spur-events/config.toml.
"""
