// On a phone, a row of a narrow table is a block of lines, each with the heading of its column.
document.addEventListener("DOMContentLoaded", () => {
  for (const table of document.querySelectorAll(".table-wrapper table")) {
    const headings = [...table.querySelectorAll("thead th")].map((cell) => cell.innerText.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, column) => {
        cell.dataset.heading = headings[column] || "";
      });
    }
  }
});
