// Package runbooks holds the pages that alerts link to, one of each alert, so that the
// master's status page can show them without a network.
//
// Nothing flows in; out flow the pages as they are in this folder.
package runbooks

import "embed"

// Pages are the runbooks by file name.
//
//go:embed *.md
var Pages embed.FS
