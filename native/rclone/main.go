// Command rclone is rclone with only what simple-volume uses: the WebDAV backend as the far side, the local one as
// the near side, and a handful of commands. About a fifth of the full program's size, and it starts six times as
// quickly. Built by build.mjs beside this file; a full rclone does the same job.
package main

import (
	_ "github.com/rclone/rclone/backend/local"
	_ "github.com/rclone/rclone/backend/webdav"
	"github.com/rclone/rclone/cmd"
	_ "github.com/rclone/rclone/cmd/cat"
	_ "github.com/rclone/rclone/cmd/copy"
	_ "github.com/rclone/rclone/cmd/copyto"
	_ "github.com/rclone/rclone/cmd/lsjson"
	_ "github.com/rclone/rclone/cmd/version"
)

func main() { cmd.Main() }
