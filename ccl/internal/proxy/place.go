package proxy

import (
	"context"
	"fmt"
	"strings"

	"github.com/lockstep-ccl/lockstep/ccl/internal/algo"
	"github.com/lockstep-ccl/lockstep/ccl/internal/symm"
)

// Place returns place with GPUs of one machine on different nodes if they cannot access each other's
// memory. All ranks must call it, and get the same nodes. On rank 0 it calls note with the pairs of GPUs
// that cannot, the resulting groups, and the reason.
func Place(ctx context.Context, place algo.Place, cfg symm.Config, note func(pairs, groups, reason string)) (algo.Place, error) {
	barriers, err := symm.Reach(ctx, cfg, place.Local)
	if err != nil || len(barriers) == 0 {
		return place, err
	}
	nodes := apart(place.Node, barriers)
	if cfg.Rank == 0 {
		tell(nodes, barriers, note)
	}
	return algo.NewPlace(cfg.Rank, nodes, place.Cores), nil
}

// apart returns the new node index of each rank. A rank joins the first group of its node whose
// members it can all access.
func apart(node []int32, barriers []symm.Barrier) []int32 {
	between := map[[2]int]bool{}
	for _, b := range barriers {
		between[[2]int{b.A, b.B}] = true
	}
	var groups [][]int
	nodes := make([]int32, len(node))
	for r := range node {
		nodes[r] = int32(len(groups))
	find:
		for g, members := range groups {
			for _, m := range members {
				if node[m] != node[r] || between[[2]int{m, r}] {
					continue find
				}
			}
			nodes[r] = int32(g)
			break
		}
		if int(nodes[r]) == len(groups) {
			groups = append(groups, nil)
		}
		groups[nodes[r]] = append(groups[nodes[r]], r)
	}
	return nodes
}

// tell calls note with at most a few pairs and groups.
func tell(nodes []int32, barriers []symm.Barrier, note func(pairs, groups, reason string)) {
	const most = 8
	var pairs []string
	for _, b := range barriers[:min(len(barriers), most)] {
		pairs = append(pairs, fmt.Sprintf("%d-%d", b.A, b.B))
	}
	if len(barriers) > most {
		pairs = append(pairs, fmt.Sprintf("and %d more", len(barriers)-most))
	}
	groups := map[int32][]string{}
	var order []int32
	for r, n := range nodes {
		if groups[n] == nil {
			order = append(order, n)
		}
		groups[n] = append(groups[n], fmt.Sprint(r))
	}
	var sets []string
	for _, n := range order[:min(len(order), most)] {
		sets = append(sets, strings.Join(groups[n], ","))
	}
	if len(order) > most {
		sets = append(sets, "…")
	}
	note(strings.Join(pairs, " "), strings.Join(sets, " | "), barriers[0].Reason)
}
