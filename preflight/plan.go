package preflight

// idle is the partner of a rank that has nothing to measure in a round.
const idle = -1

// tournament is all pairs of n ranks as rounds of disjoint pairs (the circle
// method): entry [r][i] is whom rank i measures with in round r. Every pair meets
// once, in n-1 rounds, or n when n is odd and one rank rests in each.
func tournament(n int) [][]int32 {
	seats := n + n%2
	var rounds [][]int32
	for r := range seats - 1 {
		round := make([]int32, n)
		for i := range round {
			round[i] = idle
		}
		meet := func(a, b int) {
			if a < n && b < n {
				round[a], round[b] = int32(b), int32(a)
			}
		}
		// One seat stays, the others move on by one each round.
		meet(seats-1, r)
		for k := 1; k < seats/2; k++ {
			meet((r+k)%(seats-1), (r-k+seats-1)%(seats-1))
		}
		rounds = append(rounds, round)
	}
	return rounds
}

// alone is pairs as rounds of one pair each, so that nothing else runs beside it;
// most bounds the rounds.
func alone(n int, pairs [][2]int, most int) [][]int32 {
	var rounds [][]int32
	for _, p := range pairs[:min(len(pairs), most)] {
		round := make([]int32, n)
		for i := range round {
			round[i] = idle
		}
		round[p[0]], round[p[1]] = int32(p[1]), int32(p[0])
		rounds = append(rounds, round)
	}
	return rounds
}
