package diagnosis

import "fmt"

// String returns k as a person would say it.
func (k Culprit) String() string {
	switch k.Kind {
	case CulpritRank:
		return fmt.Sprintf("rank %d", k.Rank)
	case CulpritConnection:
		return fmt.Sprintf("rank %d → rank %d", k.Rank, k.Peer)
	case CulpritSource:
		return fmt.Sprintf("rank %d → all", k.Rank)
	case CulpritDest:
		return fmt.Sprintf("all → rank %d", k.Rank)
	case CulpritNode:
		return "node " + k.Node
	}
	return "unknown"
}
