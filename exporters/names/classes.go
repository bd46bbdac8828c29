package names

// Values of LabelClass and LabelLevel: diagnosis.Class and diagnosis.Level in
// words (a test there keeps them equal). Rules and policies match on these.
const (
	ClassCommunicationHang    = "communication_hang"
	ClassNoncommunicationHang = "noncommunication_hang"
	ClassCommunicationSlow    = "communication_slow"
	ClassNoncommunicationSlow = "noncommunication_slow"

	LevelSuspected = "suspected"
	LevelConfirmed = "confirmed"
)

// Classes lists the classes of faults, in the order of package diagnosis.
var Classes = []string{ClassCommunicationHang, ClassNoncommunicationHang, ClassCommunicationSlow, ClassNoncommunicationSlow}

// VerdictAlerts are the alerts of confirmed verdicts, by class.
var VerdictAlerts = map[string]string{
	ClassCommunicationHang:    AlertCommunicationHang,
	ClassNoncommunicationHang: AlertNoncommunicationHang,
	ClassCommunicationSlow:    AlertCommunicationSlow,
	ClassNoncommunicationSlow: AlertNoncommunicationSlow,
}
