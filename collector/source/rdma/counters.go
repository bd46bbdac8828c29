package rdma

import "github.com/lockstep-ccl/lockstep/collector"

// kind is what a counter tells of.
type kind uint8

const (
	retransmission kind = iota + 1
	congestion
	failure
	receivedWords // of 4 bytes
	transmittedWords
	receivedPackets
	transmittedPackets
	transmitWaits
)

// counters are the files of hw_counters and counters that are read, by name.
// Flushed work requests (req_cqe_flush_error) are left out: every connection that is closed has some.
var counters = map[string]kind{
	// InfiniBand's own, ports/*/counters (IBTA Architecture 1.4, 16.1.3.5).
	"port_rcv_data":                   receivedWords,
	"port_xmit_data":                  transmittedWords,
	"port_rcv_packets":                receivedPackets,
	"port_xmit_packets":               transmittedPackets,
	"port_xmit_wait":                  transmitWaits,
	"symbol_error":                    failure,
	"link_error_recovery":             failure,
	"link_downed":                     failure,
	"port_rcv_errors":                 failure,
	"port_rcv_remote_physical_errors": failure,
	"port_rcv_switch_relay_errors":    failure,
	"port_rcv_constraint_errors":      failure,
	"port_xmit_constraint_errors":     failure,
	"port_xmit_discards":              failure,
	"local_link_integrity_errors":     failure,
	"excessive_buffer_overrun_errors": failure,
	"VL15_dropped":                    failure,

	// mlx5, drivers/infiniband/hw/mlx5/counters.c.
	"out_of_sequence":                retransmission,
	"duplicate_request":              retransmission, // soft-RoCE, too
	"packet_seq_err":                 retransmission,
	"implied_nak_seq_err":            retransmission,
	"local_ack_timeout_err":          retransmission,
	"rnr_nak_retry_err":              retransmission,
	"roce_adp_retrans":               retransmission,
	"roce_adp_retrans_to":            retransmission,
	"roce_slow_restart":              retransmission,
	"roce_slow_restart_trans":        retransmission,
	"np_cnp_sent":                    congestion,
	"np_ecn_marked_roce_packets":     congestion,
	"rp_cnp_handled":                 congestion,
	"rp_cnp_ignored":                 congestion,
	"roce_slow_restart_cnps":         congestion,
	"rx_icrc_encapsulated":           failure,
	"out_of_buffer":                  failure,
	"req_cqe_error":                  failure,
	"resp_cqe_error":                 failure,
	"req_remote_access_errors":       failure,
	"req_remote_invalid_request":     failure,
	"req_transport_retries_exceeded": failure,
	"req_rnr_retries_exceeded":       failure,
	"resp_local_length_error":        failure,
	"resp_remote_access_errors":      failure,

	// Soft-RoCE, drivers/infiniband/sw/rxe/rxe_hw_counters.c.
	"rcvd_pkts":              receivedPackets,
	"sent_pkts":              transmittedPackets,
	"out_of_seq_request":     retransmission,
	"rcvd_seq_err":           retransmission,
	"rcvd_rnr_err":           retransmission,
	"send_rnr_err":           retransmission,
	"completer_retry_err":    retransmission,
	"retry_exceeded_err":     failure,
	"retry_rnr_exceeded_err": failure,
	"send_err":               failure,

	// bnxt_re.
	"to_retransmits":      retransmission,
	"seq_err_naks_rcvd":   retransmission,
	"rnr_naks_rcvd":       retransmission,
	"oos_drop_count":      retransmission,
	"tx_cnp_pkts":         congestion,
	"rx_cnp_pkts":         congestion,
	"rx_ecn_marked_pkts":  congestion,
	"max_retry_exceeded":  failure,
	"unrecoverable_err":   failure,
	"res_oob_drop_count":  failure,
	"res_exceed_max":      failure,
	"res_length_mismatch": failure,

	// irdma.
	"tcpRetransSegs": retransmission,
	"cnpSent":        congestion,
	"cnpHandled":     congestion,
	"cnpIgnored":     congestion,
	"RxECNMrkd":      congestion,
}

// put files a counter's value away.
func (k kind) put(p *collector.NICPort, name string, value float64) {
	counter := collector.NICCounter{Name: name, Value: value}
	switch k {
	case retransmission:
		p.Retransmissions = append(p.Retransmissions, counter)
	case congestion:
		p.Congestion = append(p.Congestion, counter)
	case failure:
		p.Errors = append(p.Errors, counter)
	case receivedWords:
		value *= 4
		p.ReceivedBytes = &value
	case transmittedWords:
		value *= 4
		p.TransmittedBytes = &value
	case receivedPackets:
		p.ReceivedPackets = &value
	case transmittedPackets:
		p.TransmittedPackets = &value
	case transmitWaits:
		p.TransmitWaits = &value
	}
}
