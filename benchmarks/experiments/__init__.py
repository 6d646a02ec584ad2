"""Does `recserve ab` keep its promises? False alarms and power."""
